"""A report on one variant of a model: a page to open in a browser, without a network.

from rlx.viz.report import make_report, write_page
write_page("report.html", make_report(module, options))
"""

from __future__ import annotations

from rlx.viz.report.make import make_report
from rlx.viz.report.page import write_page
from rlx.viz.report.records import Report

__all__ = ["Report", "make_report", "write_page"]
