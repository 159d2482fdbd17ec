"""What fusion-encoders are made of: attention masks, layers, the two layouts, what leads into them, heads.

`layers` know nothing of images and texts; `encoder` has the layouts, single-stream and dual-stream; `inputs` turns what
any image encoder returns into their tokens; `heads` read their states; `draws` is what pretraining leaves to chance.
"""
