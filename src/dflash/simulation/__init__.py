"""What targets, queues and drafters would do, in simulated time."""
