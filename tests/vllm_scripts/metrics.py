"""What the engine counts."""

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM(model="org/model", disable_log_stats=False)
llm.generate(["The fox", "One day"], SamplingParams(temperature=0.8, top_p=0.95))
seen = {}
for metric in llm.get_metrics():
    if isinstance(metric, Gauge | Counter):
        seen[metric.name] = metric.value
    elif isinstance(metric, Vector):
        seen[metric.name] = metric.values
    elif isinstance(metric, Histogram):
        seen[metric.name] = (metric.sum, metric.count, dict(metric.buckets))
assert seen["vllm:generation_tokens"] > 0
assert seen["vllm:num_requests_running"] == 0
assert seen["vllm:time_to_first_token_seconds"][1] == 2
