"""The arithmetic by which the trajectory paper turns recall into speed, to stand beside what replay says. Pure.

It takes the share of stall that prediction removes to be the recall. Replay differs, for four reasons: a guess that is
right can be late; a wrong one takes link time; what the cache holds needs no guess, and what it lacks is predicted less
well; and a link that is busy with demands all the time has no idle time for guesses, however right.
"""

from steerpipe.core.errors import ConfigError


def amdahl_speedup(stall_share: float, recall: float) -> float:
    """1 / ((1 - f) + f / k) with k = 1 / (1 - recall): f = .6 and recall .784 give 1.89 (printed as 1.88)."""
    for what, share in (("stall share", stall_share), ("recall", recall)):
        if not 0 <= share <= 1:
            raise ConfigError(f"a {what} of {share}", fix="give a share from 0 to 1")
    left = (1.0 - stall_share) + stall_share * (1.0 - recall)
    if left == 0:
        raise ConfigError("all time is stall and all of it is removed", fix="give a stall share or a recall below 1")
    return 1.0 / left
