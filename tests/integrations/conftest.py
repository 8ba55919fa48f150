"""No test of this room speaks to anybody."""

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # before haystack is imported
