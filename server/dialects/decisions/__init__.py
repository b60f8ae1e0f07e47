"""Decisions: typed questions about one state, answered by probabilities of options; and scores of given tokens.

body -> questions -> a prompt for each -> one step each -> softmax over the labels -> answers
"""
