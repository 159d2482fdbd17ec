"""Report generation: scores of generated reports, from medvl or any other system.

    references + generated texts -> shared n-grams, shared findings -> rows with intervals ->
        results.json

    protocol.py      definition of the scores, and their baselines
    metrics.py       BLEU, ROUGE-L, METEOR, CIDEr, clinical F1 by the labeler, contents
    grounded.py      sentences with boxes
    external.py      files of CheXbert, RadGraph, CXR-Report-Metric and RadEval
    generate.py      texts of a model, and its likelihood of the references
    rexrank.py       files of the leaderboard ReXrank
    evaluation.py    options, run and page

References are complete reports as stored in the shards: they are neither truncated nor tokenized by
the model.
"""
