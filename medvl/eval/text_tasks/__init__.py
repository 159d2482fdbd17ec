"""Text encoders on BLURB and on clinical sentence tasks: fine-tuning, metrics, baselines."""
