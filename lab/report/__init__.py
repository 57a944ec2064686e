"""What the runs of a sweep show: statistics, tables, and a page with charts."""
