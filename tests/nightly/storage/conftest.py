from tests.s3 import cache, s3_server, url  # noqa: F401  (fixtures)
