from tests.faults.jobs import job  # noqa: F401  (fixtures)
from tests.s3 import cache, s3_server  # noqa: F401
