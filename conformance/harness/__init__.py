"""The pytest side: options, machine, implementation under test, results, verdict, report, replay."""
