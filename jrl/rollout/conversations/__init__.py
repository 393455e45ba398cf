"""Responses of several turns: an environment's answers stand between the policy's."""
