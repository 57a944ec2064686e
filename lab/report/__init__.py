"""Reports that compare the runs of a sweep: statistics, tables, and a page with charts."""
