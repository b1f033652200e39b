from tests.faults.jobs import job, killed, launch, undisturbed  # noqa: F401  (fixtures)
