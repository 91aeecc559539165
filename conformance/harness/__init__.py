"""The pytest side: options, machine, implementation under test, statistics, results, summary and report."""
