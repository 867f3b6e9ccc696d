"""The errors a user can cause. The command line prints them as one line and exits with status 2.

A message says what was wrong (the value seen), where (the key, file or row) and what to do about it.
"""


class KDError(RuntimeError):
    """Base of every error that bad input or a bad environment can cause."""


class ConfigError(KDError):
    """A recipe that cannot be run: unknown or missing keys, impossible sizes, contradictory settings."""


class DataError(KDError):
    """A corpus or a set of samples that cannot be read or does not fit the recipe."""


class CacheError(KDError):
    """A teacher cache that is damaged, incomplete or belongs to other tokens, another tokenizer or model."""


class StoreUnreachableError(CacheError):
    """The disk or store of a cache does not answer, or refuses to: which says nothing about the cache."""


class ForeignRowError(CacheError):
    """A sound row of a cache that is not the one of the sample: other tokens, or documents that start elsewhere."""


class CheckpointError(KDError):
    """A missing or damaged checkpoint, or one of another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not, or no longer, what was written: another one of the same run may do."""


class DivergedError(KDError):
    """The weights are no numbers any more, on every rank; a checkpoint from before is good."""


class LaunchError(KDError):
    """A command started with another number of ranks than its recipe needs."""


class RemoteRankError(KDError):
    """Another rank of the same job failed; its own message has the cause."""
