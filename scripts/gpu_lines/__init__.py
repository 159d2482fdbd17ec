"""Lines of `scripts/benchmark_gpu.py`: what each measures, and the code that measures it."""
