"""Exit codes, which a supervisor acts upon; 0 is done, or stopped by SIGTERM after saving."""

REFUSED = 2
"""A `UserError`: the user can fix it, a restart cannot."""

STOPPED = 3
"""The run diverged, or the checkpoint that the settings name is damaged: a restart cannot help."""

CRASHED = 70
"""An exception ended the process (EX_SOFTWARE of sysexits.h); a restart may help."""

HUNG = 1
"""The watchdog saw no progress, and `faulthandler` ended the process; a restart may help."""
