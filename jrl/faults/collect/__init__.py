"""From processes and hosts to records: samples, their files, their names, their clocks."""
