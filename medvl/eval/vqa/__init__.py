"""Evaluation of visual question answering, for answers from medvl or any other system.

questions + predicted answers -> protocol -> rows with intervals, next to baselines ->
    results.json

protocol.py           equal answers and rules of an evaluation: medvl's and published ones
predictions.py        answers by question id; outside.py reads those of other harnesses
accuracy.py           accuracy, next to baselines without images
controls.py           whether the answers need the image
evaluation.py         options, run and page; examples.py has the examples of the page
multiple_choice.py    multiple choice, of option_scores.py, by choice_metrics.py
"""
