"""The policies for batch-norm layers; see `rayfed.core.task.Task`. A configuration needs their names without torch."""

BATCH_NORM_POLICIES = ("aggregate", "local", "local_statistics", "frozen")
