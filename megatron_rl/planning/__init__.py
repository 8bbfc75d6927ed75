"""What a run needs of its GPUs, from a model's config.json alone: real Megatron ranks are built on torch's meta device.

`run_plan.plan_run` plans the layout of given settings; `search.best_layouts` looks for layouts of a number of GPUs.
"""
