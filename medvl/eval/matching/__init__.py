"""Image-text matching: a text against other texts and against its mirror."""
