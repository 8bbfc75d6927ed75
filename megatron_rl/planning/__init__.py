"""GPU needs of a run, from a model's config.json alone.

Real Megatron ranks are built on torch's meta device. `run_plan.plan_run` plans the layout of given
settings; `search.best_layouts` searches layouts of a number of GPUs.
"""
