"""All HTML: the viewer file of runs and trainings, and the report of a run. Both work without a server or a network."""
