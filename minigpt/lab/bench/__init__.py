"""How fast is it, against whom, and how far from what the machine allows?"""

from minigpt.lab.bench.generation import BenchPlan, bench_generate
from minigpt.lab.bench.report import BenchReport, bench_summary

__all__ = ["BenchPlan", "BenchReport", "bench_generate", "bench_summary"]
