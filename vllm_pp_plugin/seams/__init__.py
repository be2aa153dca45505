"""Every touch of vLLM's internals, one file a target.

Each file says what it wraps, why, since and until which vLLM version it is needed, how it is verified, and
when it can go; ``vllm-pp doctor`` prints the same. Methods are wrapped on their classes and no name is
rebound: vllm-ascend, for one, subclasses and rebinds ``GroupCoordinator`` after plugins have run, and a method
on the base class is inherited where a rebound name would be lost.
"""
