"""Report generation: scores of generated reports, from medvl or any other system.

    references + generated texts -> shared n-grams, shared findings -> rows with intervals ->
        results.json

`nlg_metrics` computes BLEU, ROUGE-L, METEOR and CIDEr, `clinical_f1` compares the findings that the
rule-based labeler extracts, `external_scores` reads files of CheXbert, RadGraph and
CXR-Report-Metric, `evaluate` combines them, `generate` runs a model, `read_reports` reads the
reports of other systems, and `page` writes the page. References are complete reports as stored in
the shards: they are neither truncated nor tokenized by the model.
"""
