"""Comparing runs from what they left on disk. Imports no torch."""

from megatron_kd.report.compare import Comparison, compare
from megatron_kd.report.runs import RunRecord, read_run
from megatron_kd.report.summary import RunSummary

__all__ = ["Comparison", "RunRecord", "RunSummary", "compare", "read_run"]
