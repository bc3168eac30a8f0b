"""The data plane, in the order in which data flows.

prompts → inference (vLLM) → rewards → experience (Parquet shards in the store) → batching → algorithms
→ model, trainer → weights (policy versions, back to inference).

`rollout` and `trainer` are the two entry points; they meet only in the store (`storage`), through
`writer` on the one side and `coordinator` on the other. Nothing here imports `operators`.
"""
