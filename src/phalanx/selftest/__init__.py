"""Tests the communication of the started ranks: correct values, speed, stragglers, and a short training."""
