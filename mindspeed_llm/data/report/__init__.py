"""The data report: what is in a prepared dataset, as a page, a picture and numbers."""

from mindspeed_llm.data.report.figure import require_matplotlib
from mindspeed_llm.data.report.write import write_report

__all__ = ["require_matplotlib", "write_report"]
