"""The contestants of `ultrascale bench`: each module is one, started as a process of its own."""
