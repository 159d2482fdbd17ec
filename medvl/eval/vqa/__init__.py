"""Visual question answering: judging answers, whoever gave them.

    questions + predicted answers -> protocol -> rows with intervals, baselines beside -> results.json

`normalize` decides when two answers are the same, `protocol` who is judged how (ours, and the peers' as named legacy
ones), `vocabulary` which answers a classifier may give, `baselines` what needs no image, `judge` puts them together.
"""
