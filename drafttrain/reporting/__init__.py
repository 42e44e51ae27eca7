"""What people see of runs: progress, logs, tables, figures, and a report as one page.
Rows of `metrics.json` and what a run noted go in; nothing here decodes or trains."""
