from tests.faults.jobs import killed  # noqa: F401  (a fixture)
