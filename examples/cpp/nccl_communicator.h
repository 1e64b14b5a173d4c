// A tigon::Communicator on NCCL, which is opened at run time: link with the dynamic loader, not with NCCL.
#pragma once

#include <array>
#include <memory>

#include "tigon/base/communicator.h"

// What one rank makes and the program hands to the others (a file, a socket, MPI).
using NcclId = std::array<char, 128>;
NcclId make_nccl_id();

// Called by all ranks, each with its GPU current. Throws std::runtime_error where NCCL is missing or fails.
std::unique_ptr<tigon::Communicator> make_nccl_communicator(const NcclId& id, int rank, int size);
