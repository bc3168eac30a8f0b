"""What vLLM cannot do by itself, run inside its worker: `--worker-extension-cls pipeline.vllm_worker.PackedHeads`.

On a CPU vLLM multiplies with packed copies of the weights. `reload_weights` packs every layer that it loads anew,
but not an output head that is tied to the embedding (seen in 0.32): nothing is loaded for it, so that it goes on
with the packed copy of the old embedding, and says so in its log alone. The server's models are then neither the
old policy nor the new one. Free of vLLM at import; the server mixes this class into its worker.
"""

from typing import Any


class PackedHeads:
    model_runner: Any

    def pack_heads(self) -> int:
        """Pack the output heads anew from their weights as they are; returns how many. None is packed on a GPU."""
        model = self.model_runner.get_model()
        heads = [module for module in model.modules() if type(module).__name__ == "ParallelLMHead"]
        packed = [head for head in heads if head.weight.device.type == "cpu" and _is_plain(head)]
        for head in packed:
            head.quant_method.process_weights_after_loading(head)
        return len(packed)


def _is_plain(head: Any) -> bool:
    """Packing twice does no harm to a head that is not quantised."""
    return type(head.quant_method).__name__.startswith("Unquantized")
