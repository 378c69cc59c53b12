"""Every error that a user can meet.

SteerpipeError                  base: what happened, how much, and what to do
├── InputError                  the caller's mistake (exit status 2, HTTP 400)
│   ├── ConfigError             a setting, flag or environment variable
│   ├── CheckpointError         a model folder that cannot be loaded as it is
│   │   ├── UnknownFamilyError      no declaration for this architecture
│   │   ├── UnsupportedConfigError  a key that changes numerics and is not understood
│   │   ├── TensorError             missing, extra or misshapen tensors
│   │   ├── DamagedFileError        a file that is cut short or not what it says
│   │   └── TokenizerError          no usable tokenizer
│   ├── PackError               an expert pack that cannot be used as it is
│   ├── HubError                a hub name that cannot be resolved
│   ├── PeekError               a predictor that asks for what does not exist at its decision
│   └── RequestError            a request that cannot run as asked
├── CapacityError               memory, KV blocks or disk are exhausted (exit status 1)
├── TransferError               a read or copy failed after its retries (exit status 1)
└── NumericsError               the model's numbers are not finite (exit status 1)

A mistake of ours is an `assert` with words, never one of these.
"""


class SteerpipeError(Exception):
    """Says what is wrong and, always, what to do about it."""

    exit_status = 1

    def __init__(self, what: str, *, fix: str) -> None:
        assert what, "an error needs a what"
        assert fix, "an error needs a fix"
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}"


class InputError(SteerpipeError):
    exit_status = 2


class ConfigError(InputError):
    pass


class CheckpointError(InputError):
    pass


class PeekError(InputError):
    pass


class UnknownFamilyError(CheckpointError):
    pass


class UnsupportedConfigError(CheckpointError):
    pass


class TensorError(CheckpointError):
    pass


class DamagedFileError(CheckpointError):
    pass


class TokenizerError(CheckpointError):
    pass


class PackError(InputError):
    pass


class HubError(InputError):
    pass


class RequestError(InputError):
    pass


class CapacityError(SteerpipeError):
    pass


class TransferError(SteerpipeError):
    pass


class NumericsError(SteerpipeError):
    pass
