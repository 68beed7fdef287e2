"""All HTML: the viewer file of runs and trainings, and the report of a run. Both open without a server or a network."""
