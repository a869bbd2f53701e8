"""``make bench``: ckptfmt beside what people use, and beside what memory and disk allow; ``benchmarks/run.py``."""
