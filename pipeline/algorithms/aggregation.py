"""How token losses become one loss: a weight per token, made once from the whole batch.

loss = Σ weight·token loss, over every token of every rank and micro-batch, so neither its value nor its gradient
depends on how the batch is split or packed. Only tokens inside the response mask have a weight and a share in the
denominators; tokens that an off-policy correction refused keep both.
"""

import numpy as np


def token_weights(aggregation: str, lengths: np.ndarray, max_length: int) -> np.ndarray:
    """What one token of each sample counts, [N] float64; 0 for a sample without tokens.

    `lengths` [N]: tokens inside the response mask, over all ranks; 0 for a sample that takes no part.
    `max_length`: longest response possible, in tokens; used by `constant` alone (Dr.GRPO, arXiv:2503.20783).

    Lengths [2, 8]: token-mean [1/10, 1/10], seq-mean-token-mean [1/4, 1/16], seq-mean-token-sum [1/2, 1/2],
    constant with max_length 10 [1/20, 1/20].
    """
    lengths = lengths.astype(np.float64)
    trained = lengths > 0
    sequences = np.count_nonzero(trained)
    denominators = {
        "token-mean": lengths.sum(),
        "seq-mean-token-mean": sequences * lengths,
        "seq-mean-token-sum": sequences,
        "constant": sequences * max_length,
    }
    return np.where(trained, 1.0 / np.maximum(denominators[aggregation], 1), 0.0)
