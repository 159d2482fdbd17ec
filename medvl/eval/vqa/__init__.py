"""Evaluation of visual question answering, for answers from medvl or any other system.

    questions + predicted answers -> protocol -> rows with intervals, next to baselines ->
        results.json

`answer_normalization` defines when two answers are equal, `protocol` the rules of an evaluation
(medvl's, and those of published numbers), `answer_vocabulary` the answers of a classifier,
`baselines` the systems without images, and `evaluate` combines them.
"""
