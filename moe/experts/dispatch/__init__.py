"""Token dispatch and combine across devices (expert parallelism), one file for each method."""
