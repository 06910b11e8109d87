"""Small sizes of a layer of each kind, the same for both frameworks."""

IMAGE = {"batch_size": 3, "in_features": 8, "in_size": 9}
WINDOW = {**IMAGE, "kernel": 3, "stride": 2, "padding": "same"}
TOKENS = {"batch_size": 2, "sequence_length": 5, "in_features": 8}
SIZES = {
    "conv2d": {**WINDOW, "out_features": 6, "use_bias": True, "activation": "relu"},
    "grouped_conv2d": {**WINDOW, "out_features": 12, "groups": 4, "use_bias": False, "padding": "valid"},
    "depthwise_conv2d": {**WINDOW, "use_bias": True, "activation": "tanh"},
    "dense": {"batch_size": 3, "in_features": 8, "out_features": 5, "use_bias": True},
    "batch_norm": IMAGE,
    "group_norm": {**IMAGE, "groups": 4},
    "layer_norm": TOKENS,
    "max_pool": WINDOW,
    "avg_pool": {**WINDOW, "kernel": 4, "padding": "valid"},
    "attention": {**TOKENS, "num_heads": 2, "use_bias": True},
    "lstm": {**TOKENS, "out_features": 6, "use_bias": True},
    "null": {"batch_size": 1, "in_features": 1},
}
