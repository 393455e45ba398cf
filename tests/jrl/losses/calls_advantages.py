"""Calls of the advantage estimators, for the contract of arrays."""

import jrl

# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    "gae": lambda b: jrl.gae(b["rewards"], b["values"], b["mask"], gamma=b["gamma"], lam=b["lam"]),
}
# One result per token that depends on the whole batch.
PER_BATCH = {
    "whiten": lambda b: jrl.whiten(b["advantages"], b["mask"]),
    "whiten, mean kept": lambda b: jrl.whiten(b["advantages"], b["mask"], keep_mean=True),
}
EVERYTHING = [*PER_TOKEN.values(), *PER_BATCH.values()]
