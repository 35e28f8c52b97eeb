"""motet serves thousands of LoRA fine-tunes of one base model from one Ray cluster, for many tenants at once."""

__version__ = "0.1.0"
