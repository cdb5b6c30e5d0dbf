"""What the engine did and does: traces, timelines, live metrics, the state of the GPU."""
