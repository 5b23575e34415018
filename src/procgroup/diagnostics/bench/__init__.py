"""Measure process groups beside each other, interleaved, and say how sure the ratios are.

Vocabulary::

    peer        a system under measurement: a set of rank processes that lives for the whole run
    call        one operation on every rank of one peer
    sample      the time of a few calls in a row, divided by their number
    plan        how many samples a round takes, and how many calls a sample holds
    round       one turn of every peer: A B C D, in an order that changes from round to round
    reference   the peer that the others are divided by

Machines drift: a second measured now and a second measured in a minute differ by more than the peers do. So
nothing is compared across time. Within one round the peers run one directly after the other, each round gives
one ratio per peer, and the interval is that of those ratios (``intervals``). While one peer measures, the others
block in a plain read on a socket, outside their own libraries, so that none of them spins or polls (``protocol``).
"""
