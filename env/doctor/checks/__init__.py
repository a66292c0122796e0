"""One check a file: `judge` takes a host's facts and the plan, touches nothing, and says what it finds or nothing."""
