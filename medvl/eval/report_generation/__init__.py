"""Report generation: scores of written reports, whoever wrote them.

    references + generated texts -> words in common, findings in common -> rows with intervals -> results.json

`overlap` counts words (BLEU, ROUGE-L, METEOR), `findings` what the rule labeler reads in both, `judge` puts them
together, `write` lets a model write. References are whole reports as the shards hold them: nothing is truncated, and
nothing goes through the model's vocabulary.
"""
