"""What `ultrascale bench` times: each module is one contestant, started as a process of its own."""
