"""A residual network of nine layers for images of 32 pixels, written as a user of Keras would."""

from __future__ import annotations

import keras


def _block(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    shortcut = x if stride == 1 else keras.layers.Conv2D(filters, 1, stride, use_bias=False)(x)
    y = keras.layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
    y = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
    return keras.layers.ReLU()(keras.layers.Add()([keras.layers.BatchNormalization()(y), shortcut]))


def resnet() -> keras.Model:
    """Three stages of one block each: 16, 32 and 64 filters."""
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        x = _block(x, filters, stride)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))
