// Rows of weights in files, read a tile at a time by the threads that pack them.
//
// Read, not mapped: a file that shrinks or a disk that fails would end the process with SIGBUS.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quickdraft {

// Outputs that lie one after the other in an open file.
struct FilePart {
    int file;  // descriptor
    std::int64_t offset;
    int rows;
};

// Reads the rows of a tile into a buffer of each thread.
class FileRows {
  public:
    FileRows(const std::vector<FilePart>& parts, std::size_t row_bytes, int threads)
        : parts_(parts), row_bytes_(row_bytes), buffers_(threads * tile_outputs * row_bytes) {}

    // Rows first .. first + count - 1, one after the other; null when they cannot be read.
    const std::uint8_t* read(int first, int count, int thread) {
        std::uint8_t* const buffer = buffers_.data() + thread * tile_outputs * row_bytes_;
        std::uint8_t* at = buffer;
        for (const FilePart& part : parts_) {
            const int here = std::min(count, std::max(0, part.rows - first));
            if (here > 0 && !read_all(part, first * row_bytes_, at, here * row_bytes_)) return nullptr;
            at += here * row_bytes_;
            count -= here;
            first = here > 0 ? 0 : first - part.rows;
        }
        return buffer;
    }

  private:
    static bool read_all(const FilePart& part, std::size_t start, std::uint8_t* at, std::size_t size) {
        auto offset = static_cast<off_t>(part.offset + start);
        while (size > 0) {
            const ssize_t got = pread(part.file, at, size, offset);
            if (got == 0 || (got < 0 && errno != EINTR)) return false;
            if (got < 0) continue;
            at += got;
            offset += got;
            size -= got;
        }
        return true;
    }

    const std::vector<FilePart>& parts_;
    const std::size_t row_bytes_;
    std::vector<std::uint8_t> buffers_;
};

}  // namespace quickdraft
