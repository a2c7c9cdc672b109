"""From results folders to tables, statistics, claims and the report. No torch."""
